"""MACE: an equivariant potential of higher order, with forces in the loss."""

import os

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # e3nn 0.4 loads its constants so
import warnings

warnings.filterwarnings("ignore")
import numpy as np  # noqa: E402
import torch  # noqa: E402
from ase import Atoms  # noqa: E402
from digest import digest  # noqa: E402
from e3nn import o3  # noqa: E402
from mace import data, modules  # noqa: E402
from mace.tools import AtomicNumberTable, torch_geometric  # noqa: E402

torch.manual_seed(0)
torch.set_default_dtype(torch.float32)
rng = np.random.default_rng(0)
table = AtomicNumberTable([1, 6, 8])
model = modules.MACE(
    r_max=4.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=modules.RealAgnosticResidualInteractionBlock,
    interaction_cls_first=modules.RealAgnosticResidualInteractionBlock, num_interactions=2, num_elements=3,
    hidden_irreps=o3.Irreps("16x0e + 16x1o"), MLP_irreps=o3.Irreps("16x0e"), gate=torch.nn.functional.silu,
    atomic_energies=np.zeros(3), avg_num_neighbors=8, atomic_numbers=table.zs, correlation=2,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)


def molecule():
    count = int(rng.integers(12, 24))
    atoms = Atoms(rng.choice(["H", "C", "O"], count), positions=rng.random((count, 3)) * 5)
    return data.AtomicData.from_config(data.config_from_atoms(atoms), z_table=table, cutoff=4.0)


for step in range(8):
    batch = next(iter(torch_geometric.dataloader.DataLoader([molecule() for _ in range(4)], batch_size=4)))
    found = model(batch.to_dict(), training=True, compute_force=True)
    loss = found["energy"].square().mean() + 10 * found["forces"].square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
