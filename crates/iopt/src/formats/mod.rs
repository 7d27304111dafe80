//! The formats, one file per family, and the list of them.

mod agx_uat;
mod amd_v1;
mod arm64;
mod arm64_s1;
mod arm64_s2;
mod armv7;
mod armv7_lpae;
#[macro_use]
mod list;
mod rights;
mod riscv;
mod stand_in;
mod vtd;
mod x86_64;

pub use agx_uat::AgxUat;
pub use amd_v1::{AmdV1, AmdV1_4Level};
pub use arm64::Arm64;
pub use arm64_s1::{Arm64S1, Arm64S1_4k, Arm64S1_16k, Arm64S1_64k};
pub use arm64_s2::{Arm64S2, Arm64S2_4k, Arm64S2_16k, Arm64S2_64k};
pub use armv7::Armv7;
pub use armv7_lpae::{Armv7LpaeS1, Armv7LpaeS2};
#[cfg(feature = "alloc")]
pub use list::UnknownFormat;
pub use list::{FormatFacts, FormatId};
pub use riscv::{RiscvSv, RiscvSv39, RiscvSv48, RiscvSv57};
pub use stand_in::StandIn;
pub use vtd::{VtdSecond, VtdSecond39, VtdSecond48, VtdSecond57};
pub use x86_64::{X86_64, X86_64_4Level, X86_64_5Level};
