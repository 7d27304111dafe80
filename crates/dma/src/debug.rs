//! `Debug` of types whose fields say little.

/// Implements `Debug` by a text about the value, with the parameters of a generic type behind it.
///
/// ```
/// struct Ring<T>(Vec<T>);
/// dmalane_dma::debug_as!(Ring<T>, [T], |it| "Ring({} slots)", it.0.len());
/// assert_eq!(format!("{:?}", Ring(vec![1, 2])), "Ring(2 slots)");
/// ```
#[macro_export]
macro_rules! debug_as {
    ($type:ty $(, [$($generics:tt)*])?, |$it:ident| $($text:tt)+) => {
        impl $(<$($generics)*>)? ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let $it = self;
                ::std::write!(f, $($text)+)
            }
        }
    };
}
