"""What training frameworks want of a pipeline and do not say: a file for each, one protocol."""
