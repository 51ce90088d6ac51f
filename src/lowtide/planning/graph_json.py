"""Reads and writes graphs as JSON. Input is not trusted: errors name the place in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lowtide.base.errors import GraphError
from lowtide.planning.graph import LARGEST_BYTES, MOST_SECONDS, TOLD_BITS, Graph, Id, Node, Offload


def load(path: Path) -> Graph:
    """Read a graph file.

    Raises:
        GraphError: if the file cannot be read or is not a graph.
    """
    return from_json(read_json(path, "graph"), source=str(path))


def read_json(path: Path, what: str) -> Any:
    """The decoded content of a JSON file.

    Args:
        path: the file.
        what: what the file should be, for error messages.

    Raises:
        GraphError: if the file cannot be read or is not JSON.
    """
    try:
        text = path.read_bytes()
        if not text.strip():
            raise GraphError(f"{path} is empty, and not a {what}")
        return msgspec.json.decode(text)
    except OSError as error:
        raise GraphError(f"cannot read the {what} {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise GraphError(f"{path} is not a {what}: its JSON is nested too deeply") from None


def from_json(data: object, *, source: str = "graph") -> Graph:
    """A graph from decoded node-link JSON.

    Raises:
        GraphError: names the first error found.
    """
    return _Reader(source).graph(data)


class _Reader:
    """Reads one file; every error message begins with the file's name."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, text: str) -> GraphError:
        return GraphError(f"{self.source}: {text}")

    def graph(self, data: object) -> Graph:
        if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list):
            raise self.fail('not a node-link graph: it needs {"nodes": [...], "links": [...]}')
        raw: list[Any] = data["nodes"]
        links = data.get("links", data.get("edges", []))
        if not isinstance(links, list):
            raise self.fail('"links" must be a list')
        if not raw:
            raise self.fail("the graph has no nodes: there is nothing to plan")
        index = self._index(raw)
        parents = self._parents(links, index)
        fields = [self._fields(entry, index, parents) for entry in raw]  # these add parents
        nodes = [Node(**f, parents=tuple(p)) for f, p in zip(fields, parents, strict=True)]
        self._check_kinds(nodes)
        about = data.get("graph") or {}
        if not isinstance(about, Mapping):
            raise self.fail('"graph" must be an object')
        order = self._order(about.get("order"), nodes, index)
        name = about.get("name", "")
        return Graph(nodes=tuple(nodes), order=order, name=str(name), offload=self._offload(about.get("offload")))

    def _index(self, raw: list[Any]) -> dict[Id, int]:
        index: dict[Id, int] = {}
        for i, entry in enumerate(raw):
            if not isinstance(entry, Mapping) or "id" not in entry:
                raise self.fail(f'node number {i} has no "id"')
            name = entry["id"]
            if isinstance(name, bool) or not isinstance(name, int | str):
                raise self.fail(f"the id of node number {i} must be a number or a string")
            if name in index:
                raise self.fail(f"two nodes have the id {name!r}")
            index[name] = i
        return index

    def _parents(self, links: list[Any], index: Mapping[Id, int]) -> list[dict[int, None]]:
        parents: list[dict[int, None]] = [{} for _ in index]
        for link in links:
            if not isinstance(link, Mapping) or "source" not in link or "target" not in link:
                raise self.fail(f'a link needs "source" and "target", found {link!r}')
            ends = [self._known(link[side], index, "a link") for side in ("source", "target")]
            if ends[0] == ends[1]:
                raise self.fail(f"node {link['source']!r} reads itself")
            parents[ends[1]][ends[0]] = None
        return parents

    def _known(self, name: object, index: Mapping[Id, int], who: str) -> int:
        found = index.get(name) if isinstance(name, int | str) and not isinstance(name, bool) else None
        if found is None:
            raise self.fail(f"{who} names the unknown node {name!r}")
        return found

    def _fields(self, entry: Mapping[str, Any], index: Mapping[Id, int], parents: list[dict[int, None]]) -> dict[str, Any]:
        """The fields of an entry's node but its parents, to which what the entry views or overwrites is added."""
        name = entry["id"]
        here = index[name]

        def size(key: str, *, needed: bool = False) -> int:
            value = entry.get(key, None if needed else 0)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer()))
            ):
                raise self.fail(f'node {name!r}: "{key}" must be a whole number of bytes, found {value!r}')
            if value < 0:
                raise self.fail(f'node {name!r}: "{key}" is below zero')
            if value >= LARGEST_BYTES:
                told = value if isinstance(value, float) or value.bit_length() < TOLD_BITS else "a number with many digits"
                raise self.fail(f'node {name!r}: "{key}" is {told}, more than any machine has')
            return int(value)

        def flag(key: str, usual: bool) -> bool:
            value = entry.get(key, usual)
            if not isinstance(value, bool):
                raise self.fail(f'node {name!r}: "{key}" must be true or false')
            return value

        def other(key: str) -> int | None:
            value = entry.get(key)
            return None if value is None else self._known(value, index, f'node {name!r}, "{key}",')

        seconds = entry.get("seconds", 0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_SECONDS:
            raise self.fail(f'node {name!r}: "seconds" must be a number from 0 to {MOST_SECONDS:.0e}, found {seconds!r}')
        view_of, overwrites, made_with = other("view_of"), other("overwrites"), other("made_with")
        if here in (view_of, overwrites, made_with):
            raise self.fail(f"node {name!r} names itself")
        if view_of is not None:
            parents[here][view_of] = None
        if overwrites is not None:
            parents[here if made_with is None else made_with][overwrites] = None
        return {
            "id": name,
            "bytes": size("bytes", needed=view_of is None),
            "seconds": float(seconds),
            "workspace_bytes": size("workspace_bytes"),
            "state_bytes": size("state_bytes"),
            "made_with": made_with,
            "view_of": view_of,
            "overwrites": overwrites,
            "resident": flag("resident", False),
            "recompute": flag("recompute", True),
            "move": flag("move", True),
            "keep": flag("keep", False),
            "held_until": other("held_until"),
            "module": str(entry.get("module", "")),
        }

    def _check_kinds(self, nodes: list[Node]) -> None:
        over: dict[int, Node] = {}
        for node in nodes:
            if node.made_with is not None:
                leader = nodes[node.made_with]
                if leader.made_with is not None or leader.resident:
                    raise self.fail(f'node {node.id!r}: "made_with" must name an operator, but {leader.id!r} is not one')
                if node.parents or node.seconds or node.resident or node.workspace_bytes or node.state_bytes:
                    raise self.fail(
                        f"node {node.id!r} is made with {leader.id!r}: give parents, seconds and workspace there"
                    )
            if node.view_of is not None and node.bytes:
                raise self.fail(f"node {node.id!r} is a view: it has no bytes of its own")
            if node.resident and node.parents:
                raise self.fail(f"node {node.id!r} is resident: it is never computed, so it has no parents")
            if node.held_until is not None and nodes[node.held_until].resident:
                raise self.fail(f'node {node.id!r}: "held_until" must name an operator, not a resident node')
            if node.held_until is not None and node.resident:
                raise self.fail(f'node {node.id!r} is resident and never freed: leave out "held_until"')
            if node.overwrites is not None:
                old = nodes[node.overwrites]
                other = over.setdefault(node.overwrites, node)
                if other is not node:
                    raise self.fail(f"nodes {other.id!r} and {node.id!r} both overwrite {old.id!r}: only one may")
                if old.bytes != node.bytes or old.view_of is not None or old.resident:
                    raise self.fail(
                        f"node {node.id!r} cannot overwrite {old.id!r}: both must be storages of the same size, "
                        "neither views nor resident"
                    )
        if sum(n.bytes + n.workspace_bytes + n.state_bytes for n in nodes) >= LARGEST_BYTES:
            raise self.fail("all nodes together are more bytes than any machine has")

    def _order(self, given: object, nodes: list[Node], index: Mapping[Id, int]) -> tuple[int, ...]:
        if given is None:
            wanted = list(range(len(nodes)))
        else:
            if not isinstance(given, list):
                raise self.fail('"graph.order" must be a list of ids')
            wanted = [self._known(name, index, "the order") for name in given]
            if len(set(wanted)) < len(wanted):
                raise self.fail("the order names a node twice")
            missing = set(range(len(nodes))) - set(wanted)
            if missing:
                raise self.fail(f"the order leaves out node {nodes[min(missing)].id!r}")
        order = _together(wanted, nodes)
        place = {v: t for t, v in enumerate(order)}
        if all(place[p] < place[v] for v in order for p in nodes[v].parents):
            return tuple(order)
        if given is not None:
            late = next((p, v) for v in order for p in nodes[v].parents if place[p] > place[v])
            raise self.fail(f"the order runs {nodes[late[1]].id!r} before {nodes[late[0]].id!r}, which it reads")
        return tuple(self._sorted(order, nodes))

    def _sorted(self, order: list[int], nodes: list[Node]) -> list[int]:
        """A topological order that follows the given one as far as possible."""
        import heapq

        place = {v: t for t, v in enumerate(order)}
        leader = [v if n.made_with is None else n.made_with for v, n in enumerate(nodes)]
        waiting = [{leader[p] for p in n.parents} for n in nodes]
        readers: dict[int, list[int]] = {}
        for v, parents in enumerate(waiting):
            for p in parents:
                readers.setdefault(p, []).append(v)
        ready = [(place[v], v) for v, n in enumerate(nodes) if not waiting[v] and n.made_with is None]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            v = heapq.heappop(ready)[1]
            found.append(v)
            for c in readers.get(v, ()):
                waiting[c].discard(v)
                if not waiting[c]:
                    heapq.heappush(ready, (place[c], c))
        stuck = [n.id for v, n in enumerate(nodes) if waiting[v]]
        if stuck:
            raise self.fail(f"the graph has a cycle, through node {stuck[0]!r}")
        return _together(found + [v for v, n in enumerate(nodes) if n.made_with is not None], nodes)

    def _offload(self, data: object) -> Offload | None:
        if data is None:
            return None
        try:
            found = msgspec.convert(data, _OffloadEntry)
        except msgspec.ValidationError as error:
            raise self.fail(f'"graph.offload": {error}') from None
        speeds = (found.write_bytes_per_second, found.read_bytes_per_second)
        if not all(math.isfinite(s) and s >= 1 for s in speeds) or (found.host_bytes or 0) < 0:
            raise self.fail('"graph.offload": speeds must be at least one byte per second, and "host_bytes" not below zero')
        return Offload(
            write_bytes_per_second=speeds[0],
            read_bytes_per_second=speeds[1],
            host_bytes=found.host_bytes,
            overlap=found.overlap,
        )


class _OffloadEntry(msgspec.Struct, forbid_unknown_fields=True):
    write_bytes_per_second: float
    read_bytes_per_second: float
    host_bytes: int | None = None
    overlap: bool = False


def _together(order: Iterable[int], nodes: list[Node]) -> list[int]:
    """The order with every ``made_with`` node moved right behind the node that it is made with."""
    members: dict[int, list[int]] = {}
    for v, node in enumerate(nodes):
        if node.made_with is not None:
            members.setdefault(node.made_with, []).append(v)
    return [w for v in order if nodes[v].made_with is None for w in (v, *members.get(v, ()))]


def to_json(graph: Graph) -> dict[str, Any]:
    """Node-link JSON that :func:`from_json` can read."""
    usual = Node(id=0, bytes=0, seconds=0.0)
    entries = []
    for node in graph.nodes:
        entry: dict[str, Any] = {"id": node.id, "bytes": node.bytes, "seconds": node.seconds}
        for key in ("workspace_bytes", "state_bytes", "resident", "recompute", "move", "keep", "module"):
            if getattr(node, key) != getattr(usual, key):
                entry[key] = getattr(node, key)
        for key in ("made_with", "view_of", "overwrites", "held_until"):
            at = getattr(node, key)
            if at is not None:
                entry[key] = graph.nodes[at].id
        entries.append(entry)
    links = [{"source": graph.nodes[p].id, "target": n.id} for n in graph.nodes for p in n.parents]
    about: dict[str, Any] = {"name": graph.name, "order": [graph.nodes[v].id for v in graph.order]}
    if graph.offload is not None:
        about["offload"] = {k: getattr(graph.offload, k) for k in Offload.__slots__}
    return {"directed": True, "multigraph": False, "graph": about, "nodes": entries, "links": links}
