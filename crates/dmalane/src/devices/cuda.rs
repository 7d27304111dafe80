//! An NVIDIA GPU, through the CUDA driver.

use std::error::Error;
use std::path::Path;

use dmalane_cuda::{Binds, CudaDevice, Gpu};

use super::kind::{Ability, Listed, OpenResult, Spec};
use super::option::SpecOption;
use crate::open_options::OpenOptions;
use crate::size::binary;

/// A GPU, `cuda:NUMBER` or `cuda:UUID`.
#[derive(Clone, PartialEq, Debug)]
pub struct CudaSpec {
    /// Its number, its UUID or the first digits of that.
    pub gpu: String,
    /// The library of the driver, if it is not the usual one.
    pub library: Option<String>,
    /// How it binds.
    pub binds: Binds,
}

impl Spec for CudaSpec {
    const NAME: &'static str = "cuda";
    const SYNTAX: &'static str = "cuda:NUMBER|UUID";
    const ABOUT: &'static str = "an NVIDIA GPU, through the CUDA driver";
    const ABILITIES: &'static [Ability] = &[Ability::NeedsDriver];

    fn parse(what: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let digits = |text: &str| text.len() >= 4 && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        let uuid = what.strip_prefix("GPU-").or_else(|| what.strip_prefix("MIG-"));
        if what.parse::<u32>().is_err() && !uuid.is_some_and(digits) {
            return Err(format!("{what:?} is neither the number of a GPU nor its UUID (GPU-..., MIG-...)").into());
        }
        Ok(Self { gpu: what.to_owned(), library: None, binds: Binds::Flat })
    }

    fn options() -> Vec<SpecOption<Self>> {
        vec![
            SpecOption::flag("vmm", "bind buffers by cuMemMap, in pages of 2 MiB", |spec: &mut Self| {
                spec.binds = Binds::CuMemMap
            }),
            SpecOption::valued("lib", "PATH", "the library of the driver [libcuda.so.1]", |spec: &mut Self, text| {
                spec.library = Some(text.to_owned());
                Ok(())
            })
            .with_commas(),
        ]
    }

    fn open(&self, _: &OpenOptions) -> OpenResult {
        Ok(Box::new(CudaDevice::open(&self.gpu, self.library.as_deref(), self.binds)?))
    }

    fn list(root: &Path) -> Vec<Listed> {
        // The driver belongs to the machine that runs.
        if root != Path::new("/") {
            return Vec::new();
        }
        let can = |can: bool| Some(if can { "yes" } else { "no" }.to_owned());
        let listed = |gpu: Gpu| Listed {
            name: format!("cuda:{}", gpu.number),
            supported: gpu.virtual_memory,
            about: format!("{}, CUDA {}.{}", gpu.name, gpu.driver.0, gpu.driver.1),
            facts: vec![
                ("uuid", Some(gpu.uuid)),
                ("pci", Some(gpu.pci)),
                ("memory", Some(binary(gpu.memory))),
                ("host_register", can(gpu.host_register)),
                ("virtual_memory", can(gpu.virtual_memory)),
                ("dma_buf", can(gpu.dma_buf)),
                ("copy_engines", Some(gpu.copy_engines.to_string())),
            ],
        };
        // `dmalane doctor` says why there are none.
        dmalane_cuda::gpus(None).unwrap_or_default().into_iter().map(listed).collect()
    }
}
