"""One rank of a test in a process of its own: a package, its weights and steps out of a folder.

Called with the folder, the rank and the number of ranks; writes what each step gives.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from packages import load_libraries
from torch import distributed as dist

import sitsc.core.ops  # noqa: F401  (registers the operators)


def main(folder: Path, rank: int, size: int) -> None:
    """Run every step; the ranks meet over a file."""
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    kept = load_libraries()
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(  # pyright: ignore[reportAttributeAccessIssue]
        str(folder / "step.pt2"), "model", False, 1, -1
    )
    given = torch.load(folder / f"rank_{rank}.pt")
    weights = {key: given["weights"][key] for key in loader.get_constant_fqns()}
    loader.load_constants(weights, False, True, True)
    pools = given["pools"] | {"tp_rank": torch.tensor([rank])}
    results = []
    with torch.no_grad():
        for step in given["steps"]:
            values = pools | step
            results.append(loader.run([values[name] for name in given["inputs"]])[0])
    torch.save(torch.cat(results), folder / f"result_{rank}.pt")
    dist.destroy_process_group()
    del kept


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
