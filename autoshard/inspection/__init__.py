"""Question a plan: explain, compare, replan and assert; `report/` shows it."""
