//! The driver of every card with the register map of `docs/formats/card.md`.
//!
//! The formats ([`regs`], [`Descriptor`], [`CompletionEntry`]) are shared with models of such a card. The driver
//! ([`Card`], [`CardQueue`]) reaches the device only through [`dmalane_dma::Mmio`].

#[cfg(target_endian = "big")]
compile_error!("rings are little-endian, and their words are stored as the processor has them");

mod card_device;
mod descriptor;
mod driver;
mod error;
mod in_flight;
mod layout;
mod queue;
mod registers;
pub mod regs;
mod rings;
mod tables;

pub use card_device::{CardDevice, CardUse};
pub use descriptor::{CompletionEntry, Descriptor, Halt, Malformed, PlainCopy, Status, Task};
pub use driver::Card;
pub use error::{ChannelError, Error};
pub use layout::CardLayout;
pub use queue::CardQueue;
pub use tables::CardTables;
