"""sitsc.core.serving: request, scheduler and page allocator in plain Python."""
