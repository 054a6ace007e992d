"""Small trials on the job's own files: read again, behind one another, by requests."""
