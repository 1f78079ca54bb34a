# SPDX-License-Identifier: Apache-2.0
"""What a device must show before a stage is served on it; `scripts/device_check.sh` runs it, on a CPU, too."""
