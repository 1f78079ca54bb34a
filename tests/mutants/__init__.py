# SPDX-License-Identifier: Apache-2.0
"""Known bugs, put into a copy of the source one at a time: each must be caught. `make mutants` runs them."""
