"""Predict risks of patients from CT volumes: yes/no questions. Many answers may be unknown."""
