"""Show a plan: tables, an HTML page, a trace."""
