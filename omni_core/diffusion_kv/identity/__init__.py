# SPDX-License-Identifier: Apache-2.0
"""What decides that two prefixes are the same: canonical digests of images, and the namespace they live in.

canonical   any plain value or tensor to bytes, typed, without pickle
images      one digest per reference image: what its keys and values depend on
namespace   model, layout rule, hashing rule, adapter, weights
"""
