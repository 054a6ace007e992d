"""Sources over files at URLs: listing, reading ahead, retries."""
