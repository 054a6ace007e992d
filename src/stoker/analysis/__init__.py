"""Why an accelerator is idle: what was measured, what it means, what would help."""
