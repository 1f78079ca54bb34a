# SPDX-License-Identifier: Apache-2.0
"""The `omni-core` command: one module per subcommand."""
