"""ignite: a trainer made of a function, events and a ResNet of transformers."""

from digest import digest
from ignite.engine import Engine, Events
from transformers import ResNetConfig, ResNetForImageClassification

import torch

torch.manual_seed(0)
model = ResNetForImageClassification(ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
                                                  layer_type="basic", num_labels=10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def train_step(engine, batch):
    model.train()
    optimizer.zero_grad()
    x, y = batch
    loss = model(pixel_values=x, labels=y).loss
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(train_step)


@trainer.on(Events.ITERATION_COMPLETED)
def tell(engine):
    print(engine.state.iteration, engine.state.output, flush=True)


trainer.run([(torch.randn(24, 3, 64, 64), torch.randint(0, 10, (24,))) for _ in range(10)], max_epochs=1)
print(digest(model))
