"""Looking into a captured CUDA graph: names of its kernels, which nodes can be switched, and a drawing of it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.aio.capture import nodes_of
from eagle.kernels.device_call import cuda_driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ("dot_of", "kernel_names", "togglable")


def togglable(node: int) -> bool:
    """Whether CUDA can switch a node of that type in an executable graph: kernels, copies and fills."""
    driver = cuda_driver()
    types = driver.CUgraphNodeType
    switchable = (types.CU_GRAPH_NODE_TYPE_KERNEL, types.CU_GRAPH_NODE_TYPE_MEMCPY, types.CU_GRAPH_NODE_TYPE_MEMSET)
    return driver.cuGraphNodeGetType(node)[1] in switchable


def kernel_names(graph: int, bodies: Mapping[int, Any]) -> list[str]:
    """Names of the kernels of a graph in the order they were added, those of conditional bodies in their place.

    Args:
        graph: Raw handle of the graph's definition.
        bodies: Definitions of the bodies of conditional nodes, by the handle of the node.
    """
    driver = cuda_driver()
    names: list[str] = []
    for node in nodes_of(graph):
        if node in bodies:
            names += kernel_names(int(bodies[node].handle), bodies)
        elif driver.cuGraphNodeGetType(node)[1] == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            names.append(_name_of(node))
    return names


def _name_of(node: int) -> str:
    driver = cuda_driver()
    status, params = driver.cuGraphKernelNodeGetParams(node)
    if int(status) == 0:
        by_function, by_kernel = getattr(driver, "cuFuncGetName", None), getattr(driver, "cuKernelGetName", None)
        for query, handle in ((by_function, params.func), (by_kernel, params.kern)):
            if query is not None and int(handle):
                status, name = query(handle)
                if int(status) == 0:
                    return str(name.decode())
    return "kernel"  # drivers before 12.3 do not tell


def dot_of(title: str, definition: Any, order: Sequence[int], members: Iterable[tuple[str, Sequence[int]]]) -> str:
    """CUDA's own drawing of a graph in Graphviz' language, with each member's nodes in a labelled box.

    Args:
        title: Name of the graph.
        definition: cuda-core's definition.
        order: Handles of its nodes in the order they were added, which is how the drawing numbers them.
        members: Name and node handles of each member.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        definition.debug_dot_print(str(path))
        drawing = path.read_text(encoding="utf-8", errors="replace")
    first = re.search(r'"(graph_\d+)_node_0"', drawing)
    if first is None:
        return drawing
    number = {handle: index for index, handle in enumerate(order)}
    boxes = []
    for index, (name, nodes) in enumerate(members):
        inside = " ".join(f'"{first[1]}_node_{number[node]}";' for node in nodes if node in number)
        boxes.append(f'subgraph cluster_member_{index} {{ label="{_escaped(name)}"; style="solid"; {inside} }}')
    opening = re.search(rf'label="{first[1]}"[^\n]*\n', drawing)
    if opening is None:
        return drawing
    head = opening[0].replace(f'label="{first[1]}"', f'label="{_escaped(title)}"')
    return drawing[: opening.start()] + head + "\n".join(boxes) + "\n" + drawing[opening.end() :]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
