"""Data that ships with the package: a small trained model, calibration text and held-out text."""
