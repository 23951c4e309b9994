"""Data: what was measured on real cards (devices.yaml) and presets with datasheet facts (cards/)."""
