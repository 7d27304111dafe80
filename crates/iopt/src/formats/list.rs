//! The list of formats, from which everything that goes over all of them is made.

use core::fmt;

use dmalane_addr::{Access, PageSizes};

use crate::{Format, TableShape};

/// Calls the macro of a name with the list of all formats: a line `name: Type;` each.
///
/// This list is the only one. The test suites, [`FormatId`] and what chooses a format at run time are made from it. A
/// name is [`Format::NAME`] with `_` for `-`, which is checked at compile time.
///
/// ```
/// macro_rules! count {
///     ($($name:ident: $format:ty;)*) => { [$(stringify!($name)),*].len() };
/// }
/// assert_eq!(dmalane_iopt::formats!(count), dmalane_iopt::FormatId::ALL.len());
/// ```
#[macro_export]
macro_rules! formats {
    ($each:ident) => {
        $crate::formats! { @list [$each] }
    };
    (@list [$($each:tt)+] $($before:tt)*) => {
        $($each)+! {
            $($before)*
            agx_uat: $crate::AgxUat;
            amd_v1_3level: $crate::AmdV1<3>;
            amd_v1_3level_groups: $crate::AmdV1<3, true>;
            amd_v1_4level: $crate::AmdV1<4>;
            amd_v1_4level_groups: $crate::AmdV1<4, true>;
            amd_v1_5level: $crate::AmdV1<5>;
            amd_v1_6level: $crate::AmdV1<6>;
            arm64_s1_4k: $crate::Arm64S1<12>;
            arm64_s1_4k_39: $crate::Arm64S1<12, 39>;
            arm64_s1_4k_52: $crate::Arm64S1<12, 52, false, 52>;
            arm64_s1_4k_contiguous: $crate::Arm64S1<12, 48, true>;
            arm64_s1_4k_dirty: $crate::Arm64S1<12, 48, false, 48, true>;
            arm64_s1_16k: $crate::Arm64S1<14>;
            arm64_s1_16k_52: $crate::Arm64S1<14, 52, false, 52>;
            arm64_s1_16k_52_contiguous: $crate::Arm64S1<14, 52, true, 52>;
            arm64_s1_16k_contiguous: $crate::Arm64S1<14, 48, true>;
            arm64_s1_64k: $crate::Arm64S1<16>;
            arm64_s1_64k_48_52_contiguous_dirty: $crate::Arm64S1<16, 48, true, 52, true>;
            arm64_s1_64k_52: $crate::Arm64S1<16, 52, false, 52>;
            arm64_s1_64k_contiguous: $crate::Arm64S1<16, 48, true>;
            arm64_s2_4k: $crate::Arm64S2<12>;
            arm64_s2_4k_40: $crate::Arm64S2<12, 40>;
            arm64_s2_4k_40_contiguous: $crate::Arm64S2<12, 40, true>;
            arm64_s2_4k_40_contiguous_dirty: $crate::Arm64S2<12, 40, true, 48, true>;
            arm64_s2_4k_52: $crate::Arm64S2<12, 52, false, 52>;
            arm64_s2_4k_52_contiguous: $crate::Arm64S2<12, 52, true, 52>;
            arm64_s2_16k: $crate::Arm64S2<14>;
            arm64_s2_16k_40: $crate::Arm64S2<14, 40>;
            arm64_s2_16k_40_contiguous: $crate::Arm64S2<14, 40, true>;
            arm64_s2_16k_52: $crate::Arm64S2<14, 52, false, 52>;
            arm64_s2_64k: $crate::Arm64S2<16>;
            arm64_s2_64k_40: $crate::Arm64S2<16, 40>;
            arm64_s2_64k_40_contiguous: $crate::Arm64S2<16, 40, true>;
            arm64_s2_64k_48_52_contiguous: $crate::Arm64S2<16, 48, true, 52>;
            arm64_s2_64k_52: $crate::Arm64S2<16, 52, false, 52>;
            armv7_lpae_s1: $crate::Armv7LpaeS1;
            armv7_lpae_s2: $crate::Armv7LpaeS2;
            armv7_short: $crate::Armv7;
            riscv_sv39: $crate::RiscvSv<3>;
            riscv_sv39_napot: $crate::RiscvSv<3, true>;
            riscv_sv48: $crate::RiscvSv<4>;
            riscv_sv48_napot: $crate::RiscvSv<4, true>;
            riscv_sv48_pbmt: $crate::RiscvSv<4, false, true>;
            riscv_sv57: $crate::RiscvSv<5>;
            riscv_sv57_napot: $crate::RiscvSv<5, true>;
            vtd_second_39: $crate::VtdSecond<3>;
            vtd_second_48: $crate::VtdSecond<4>;
            vtd_second_57: $crate::VtdSecond<5>;
            x86_64_4level: $crate::X86_64<4>;
            x86_64_5level: $crate::X86_64<5>;
        }
    };
    (@match ($id:expr, $format:ident => $do:expr) $($name:ident: $type:ty;)*) => {
        match $id {
            $($crate::FormatId::$name => {
                type $format = $type;
                $do
            })*
            #[allow(unreachable_patterns)] // needed elsewhere only, where the enum is not exhaustive
            _ => unreachable!("a format that the list has not"),
        }
    };
}

/// Evaluates an expression for the format that a [`FormatId`] names, by a type name that the expression uses.
///
/// ```
/// use dmalane_iopt::{Format, FormatId, with_format};
///
/// let levels = |format: FormatId| with_format!(format, F => F::LEVELS);
/// assert_eq!(levels("riscv-sv57".parse()?), 5);
/// # Ok::<(), dmalane_iopt::UnknownFormat>(())
/// ```
#[macro_export]
macro_rules! with_format {
    ($id:expr, $format:ident => $do:expr) => {
        $crate::formats! { @list [$crate::formats] @match ($id, $format => $do) }
    };
}

macro_rules! ids {
    ($($name:ident: $format:ty;)*) => {
        /// One of the formats of [`formats!`](crate::formats), for callers that choose it at run time. [`with_format!`]
        /// leads from it to the type; it is parsed from and displayed as [`Format::NAME`].
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[allow(non_camel_case_types)] // as in the list
        #[non_exhaustive]
        pub enum FormatId {
            $(#[doc = concat!("`", stringify!($format), "`")] $name),*
        }

        impl FormatId {
            /// All formats, in the order of the list.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }

        $(const _: () = assert!(
            is_name(<$format>::NAME, stringify!($name)),
            concat!("the name in the list is not that of the format: ", stringify!($name))
        );)*
    };
}
formats!(ids);

/// True when `name` is `in_list` with `-` for `_`.
const fn is_name(name: &str, in_list: &str) -> bool {
    let (name, in_list) = (name.as_bytes(), in_list.as_bytes());
    let mut i = 0;
    while i < name.len() && i < in_list.len() {
        if name[i] != if in_list[i] == b'_' { b'-' } else { in_list[i] } {
            return false;
        }
        i += 1;
    }
    name.len() == in_list.len()
}

/// Constants of a format, and what its leaves express.
#[derive(Debug)]
#[non_exhaustive]
pub struct FormatFacts {
    /// [`Format::NAME`].
    pub name: &'static str,
    /// [`Format::PAGE_SIZES`].
    pub page_sizes: PageSizes,
    /// [`Format::INPUT_BITS`].
    pub input_bits: u32,
    /// [`Format::OUTPUT_BITS`].
    pub output_bits: u32,
    /// The sizes of the format's tables.
    pub shape: TableShape,
    /// [`Format::supports`].
    pub supports: fn(Access) -> bool,
}

impl FormatFacts {
    /// Those of a format.
    #[inline(always)]
    pub const fn of<F: Format>() -> &'static Self {
        const {
            &Self {
                name: F::NAME,
                page_sizes: F::PAGE_SIZES,
                input_bits: F::INPUT_BITS,
                output_bits: F::OUTPUT_BITS,
                shape: TableShape::of::<F>(),
                supports: F::supports,
            }
        }
    }
}

impl FormatId {
    /// [`Format::NAME`].
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Of the format.
    pub fn facts(self) -> &'static FormatFacts {
        with_format!(self, F => FormatFacts::of::<F>())
    }
}

impl fmt::Display for FormatId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No page-table format has this name.
#[cfg(feature = "alloc")]
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UnknownFormat {
    /// The name that was asked for.
    pub name: alloc::string::String,
}

#[cfg(feature = "alloc")]
impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the page-table format {:?} is unknown", self.name)
    }
}

#[cfg(feature = "alloc")]
impl core::error::Error for UnknownFormat {}

#[cfg(feature = "alloc")]
impl core::str::FromStr for FormatId {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let found = Self::ALL.iter().find(|format| format.name() == name);
        found.copied().ok_or_else(|| UnknownFormat { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use super::*;

    #[test]
    fn names_lead_to_formats_and_back() {
        for format in FormatId::ALL {
            assert_eq!(format.name().parse(), Ok(*format));
        }
        assert_eq!(FormatId::arm64_s2_16k_40.name(), "arm64-s2-16k-40");
        assert_eq!((FormatId::agx_uat.facts().input_bits, FormatId::armv7_short.facts().output_bits), (39, 32));
        // A page of Arm's second stage can be write-only, one of x86 cannot.
        let write_only =
            [FormatId::arm64_s2_4k, FormatId::x86_64_4level].map(|format| (format.facts().supports)(Access::WRITE));
        assert_eq!(write_only, [true, false]);
        let error = "arm64_s1_4k".parse::<FormatId>().unwrap_err();
        assert_eq!(error, UnknownFormat { name: "arm64_s1_4k".to_owned() });
    }
}
