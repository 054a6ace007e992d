"""Sources over files at URLs: listing, reading ahead, trying again."""
