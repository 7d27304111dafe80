//! Tests of the device, on any Vulkan driver: under the validation layers, where they are installed.

mod conformance;
