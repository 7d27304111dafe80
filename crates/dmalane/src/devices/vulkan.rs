//! A GPU, through its Vulkan driver.

use std::error::Error;
use std::path::Path;

use dmalane_dma::error_chain;
use dmalane_vulkan::{GpuInfo, MemoryHeap, VulkanDevice, VulkanOptions};

use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::{SpecOption, number};
use crate::open_options::OpenOptions;
use crate::size::binary;

/// A GPU, `vulkan:NUMBER`, `vulkan:NAME` or `vulkan:UUID`.
#[derive(Clone, Debug)]
pub struct VulkanSpec {
    /// Its number, its UUID or a part of its name.
    pub gpu: String,
    /// How it is opened.
    pub options: VulkanOptions,
}

impl Spec for VulkanSpec {
    const NAME: &'static str = "vulkan";
    const SYNTAX: &'static str = "vulkan:NUMBER|NAME|UUID";
    const ABOUT: &'static str = "a GPU, through its Vulkan driver";
    const ABILITIES: &'static [Ability] = &[Ability::NeedsDriver];
    const COMMAS: bool = true;

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        match what {
            "" => Err("the number, name or UUID of a GPU is missing".into()),
            _ => Ok(Self { gpu: what.to_owned(), options: VulkanOptions::default() }),
        }
    }

    fn options() -> Vec<SpecOption<Self>> {
        vec![
            SpecOption::flag("flat", "no sparse binding: addresses are card addresses", |spec: &mut Self| {
                spec.options.sparse = false
            }),
            SpecOption::valued(
                "channels",
                "N",
                "queues, 1 to 16 [those of the driver that copy]",
                |spec: &mut Self, text| number(text, 1..=16).map(|it| spec.options.channels = Some(it)),
            ),
        ]
    }

    fn open(&self, options: &OpenOptions) -> OpenResult {
        let wanted = VulkanOptions { sparse: self.options.sparse && !options.flat, ..self.options.clone() };
        Ok(Box::new(VulkanDevice::open(&self.gpu, &wanted)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        // Drivers belong to the machine that runs.
        if root != Path::new("/") {
            return Vec::new();
        }
        dmalane_vulkan::gpus().unwrap_or_default().into_iter().map(listed).collect()
    }
}

fn listed(gpu: GpuInfo) -> Listed {
    // OpenResult, because only then is known in which pages it binds.
    let opened = VulkanDevice::open(&gpu.index.to_string(), &VulkanOptions::default());
    let heap =
        |h: &MemoryHeap| format!("{} of {}", binary(h.bytes), if h.device_local { "its own" } else { "the host" });
    let pages = opened.as_ref().ok().and_then(VulkanDevice::sparse_pages).map(|size| format!("{size} pages"));
    let limits = format!(
        "{} an allocation, {} a buffer, {}",
        binary(gpu.max_allocation),
        binary(gpu.max_buffer),
        match gpu.max_allocations {
            u32::MAX => "any number of allocations".to_owned(),
            most => format!("{most} allocations"),
        }
    );
    let limits = match gpu.sparse {
        Some(bytes) => format!("{limits}, {} of addresses for sparse buffers", binary(bytes)),
        None => limits,
    };
    let dma_buf = match (gpu.dma_buf_import, gpu.dma_buf_export) {
        (true, true) => "yes",
        (true, false) => "import",
        (false, true) => "export",
        (false, false) => "no",
    };
    Listed {
        name: format!("vulkan:{}", gpu.index),
        supported: opened.is_ok(),
        about: match &opened {
            Ok(_) => gpu.to_string(),
            Err(e) => error_chain(e),
        },
        facts: vec![
            ("uuid", Some(gpu.uuid())),
            ("host_import", gpu.host_import.map(|align| format!("at multiples of {align} bytes"))),
            ("dma_buf", Some(dma_buf.to_owned())),
            ("sparse_binding", pages),
            ("queues", Some(gpu.queues())),
            ("memory", Some(gpu.heaps.iter().map(heap).collect::<Vec<_>>().join(" and "))),
            ("limits", Some(limits)),
        ],
    }
}
