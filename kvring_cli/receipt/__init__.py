"""What a person can hand to a helper: how it was started, on what, and how it went. No content, no name, no path."""
