# SPDX-License-Identifier: Apache-2.0
"""The stage-output cache: gate, policy, manager, controller, pools, outputs. Knows no engine and no hardware."""
