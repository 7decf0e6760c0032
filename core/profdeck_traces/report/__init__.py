"""A run as one self-contained page: findings, timelines, tables and pictures, without anything from elsewhere."""
