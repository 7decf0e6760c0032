"""Helpers of both packages."""
