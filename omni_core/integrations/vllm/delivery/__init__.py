# SPDX-License-Identifier: Apache-2.0
"""From saved steps to the sink: the threads between them, what is known of each request, what was delivered."""
