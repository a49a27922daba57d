"""Ready edit functions, and what edits need."""
