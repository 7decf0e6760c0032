"""A run as long tables: the same numbers as its summary, a row each, for notebooks, CSV and Parquet."""
