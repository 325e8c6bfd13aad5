"""The mathematics, as pure functions: formulas in the docstrings, golden numbers in the tests."""
