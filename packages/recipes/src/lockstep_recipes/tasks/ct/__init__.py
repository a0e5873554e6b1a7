"""Risks of patients from CT volumes: yes/no questions, many of whose answers are unknown."""
