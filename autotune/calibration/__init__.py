"""Constants fitted to measurements, and how far predictions with them can be trusted."""
