"""Support for training frameworks: a file for each, and one protocol that all of them implement."""
