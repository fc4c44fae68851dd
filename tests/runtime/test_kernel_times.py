"""Kernel classes by the names that a profiler shows."""

from sitsc.runtime.kernel_times import kernel_class

TEMPLATES = ["skinny_ahead", "skinny", "gemv", "place", ""]


def test_classes_are_templates_or_the_library():
    names = {name: name for name in TEMPLATES if name}
    names |= {"gemv2T_kernel_val": "library", "nvjet_tst_128x256": "library", "": "library"}
    names |= {"void at::native::elementwise_kernel": "library", "Memset (Device)": "library"}
    assert {name: kernel_class(name, TEMPLATES) for name in names} == names
