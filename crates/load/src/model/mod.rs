//! The host's side of a model: its files and tensors, and reading them into memory within a limit.

mod block;
mod budget;
mod expected;
mod file;
mod host;
mod inputs;
mod onto;
mod plan;
mod reader;
mod report;
mod slice;
mod stream;

pub use block::{Block, HostTensor, model_heap};
pub use file::{ModelFile, Select};
pub use host::{HostModel, LoadOptions, ModelOptions};
pub use inputs::Inputs;
pub use onto::Part;
pub use report::{HostRates, Reads};
pub use stream::{Next, TensorStream};
