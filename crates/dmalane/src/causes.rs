//! Errors as text, with their causes.

use std::error::Error;

/// The message of an error with those of its causes that it does not repeat, separated by colons.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&e| e.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

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
