"""Problem, rows and device → kernel: what is legal, what was measured, what it costs."""
