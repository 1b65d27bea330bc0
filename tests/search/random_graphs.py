"""Draw random graphs for searches: products with parameters and of values, pointwise calls, sums over a dim, views."""

from __future__ import annotations

import random

WEIGHTS = ("w0", "w1", "w2", "w3")


def random_graph(seed: int, mesh: str, calls: int = 8) -> str:
    """Return a graph of `calls` calls as text: one chain, whose calls also read values that were computed before."""
    draw = random.Random(seed)
    rows, columns = draw.choice(((64, 64), (2048, 2048), (8192, 8192), (4096, 256), (256, 8192)))
    square = f"f32[{columns}, {columns}]"
    lines = [f"mesh {mesh}", "stage CAPTURED", *(f'%{w}: {square} = parameter("{w}")' for w in WEIGHTS)]
    lines.append(f'%x: f32[{rows}, {columns}] = input("x")')
    shapes = {"x": f"[{rows}, {columns}]"}
    last = "x"
    for number in range(calls):
        name, shape = f"v{number}", shapes[last]
        others = [value for value, one in shapes.items() if one == shape]
        thin = [value for value, one in shapes.items() if one == f"[{rows}, 1]"]
        made = {
            "relu": (f"relu(%{last})", shape),
            "add": (f"add.Tensor(%{last}, %{draw.choice(others[-2:])})", shape),
        }
        if shape == f"[{rows}, {columns}]":
            made["mm"] = f"mm(%{last}, %{draw.choice(WEIGHTS)})", shape
            made["mm again"] = f"mm(%{last}, %{draw.choice(WEIGHTS)})", shape
            made["sum"] = f"sum.dim_IntList(%{last}, [1], True)", f"[{rows}, 1]"
            made["view"] = f"view(%{last}, [{rows // 4}, 4, {columns}])", f"[{rows // 4}, 4, {columns}]"
            if thin:
                made["scale"] = f"mul.Tensor(%{last}, %{draw.choice(thin)})", shape
        elif shape == f"[{rows}, 1]":
            whole = [value for value, one in shapes.items() if one == f"[{rows}, {columns}]"]
            made["spread"] = f"mul.Tensor(%{draw.choice(whole)}, %{last})", f"[{rows}, {columns}]"
        else:
            made["view back"] = f"view(%{last}, [{rows}, {columns}])", f"[{rows}, {columns}]"
        call, shapes[name] = made[draw.choice(sorted(made))]
        lines.append(f"%{name}: f32{shapes[name]} = {call}")
        last = name
    lines.append(f'return output("output") %{last}')
    return "\n".join(lines) + "\n"
