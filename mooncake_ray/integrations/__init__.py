"""Other packages' batches and stores, on this package's. Each module needs its package, and is imported only where that is used."""
