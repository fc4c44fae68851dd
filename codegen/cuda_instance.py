"""From a template and its parameters to a `KernelSource`: what all CUDA kernels have in common.

Pointers are divisible by 16 bytes. `pdl` renders dependent launch, `early` triggers the next kernel
at the start rather than at the end.
"""

from sitsc.codegen.triton_source import KernelSource, render

Arguments = tuple[tuple[str, str], ...]


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def make(
    name: str,
    arguments: Arguments,
    constants: dict[str, int],
    num_warps: int,
    pdl: bool,
    early: bool = True,
    num_stages: int = 1,
    registers: int = 0,
    **parameters: object,
) -> KernelSource:
    """The instance of template cuda_<name> with these arguments and constants."""
    text = render(f"cuda_{name}.py.j2", name=name, pdl=pdl, early=early, **parameters)
    return KernelSource(
        name=name,
        template=name,
        text=text,
        arguments=arguments,
        constants=dict(constants),
        aligned=tuple(name for name, kind in arguments if kind.startswith("*")),
        num_warps=num_warps,
        num_stages=num_stages,
        pdl=pdl,
        registers=registers,
    )
