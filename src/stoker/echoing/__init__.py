"""echoing"""
