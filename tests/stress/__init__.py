"""Long runs that try to break the pool: `python -m stress store|ray|soak`. Nothing here is part of the package."""
