//! Errors as text, with their causes, and what they say about the device.

use std::error::Error;

pub use dmalane_dma::error_chain;

/// True when this error, or one of its causes, says that a device is lost: its driver has lost it, or the process that
/// serves it has ended or does not answer. It must be opened again.
pub fn is_lost(error: &(dyn Error + 'static)) -> bool {
    #[cfg(feature = "daemon")]
    use dmalane_daemon::ClientError;
    std::iter::successors(Some(error), |&e| e.source()).any(|e| {
        let lost = matches!(e.downcast_ref(), Some(dmalane_vfio_user::Error::Unanswered { .. }));
        #[cfg(feature = "vulkan")]
        let lost = lost || matches!(e.downcast_ref(), Some(dmalane_vulkan::Error::Lost(_)));
        #[cfg(feature = "cuda")]
        let lost = lost || matches!(e.downcast_ref(), Some(dmalane_cuda::Error::Lost(_)));
        #[cfg(feature = "daemon")]
        let lost = lost || matches!(e.downcast_ref(), Some(ClientError::Disconnected(_) | ClientError::Timeout { .. }));
        lost
    })
}
