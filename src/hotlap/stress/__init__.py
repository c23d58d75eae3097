"""Killing trainings on purpose: does every one of them end as if nothing had been?"""
