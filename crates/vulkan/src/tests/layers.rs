//! The validation layers, which check every call, with a callback that collects their messages.
//!
//! `unsafe` because every call of Vulkan is.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ash::{Entry, Instance, ext, vk};

use crate::error::{CallError, Error};
use crate::fault::Faults;
use crate::library::create;

/// The validation layer.
const LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// Messages of the validation layers, as they come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Messages(Arc<Mutex<Vec<String>>>);

impl Messages {
    pub fn new() -> Self {
        Self::default()
    }

    /// Those that have come, which are forgotten by that.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, message: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message);
    }
}

/// A messenger of an instance; to be dropped before that.
pub(crate) struct Watch {
    debug: ext::debug_utils::Instance,
    messenger: vk::DebugUtilsMessengerEXT,
    /// The messages that the messenger's callback points to.
    _messages: Arc<Messages>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the instance exists, and the messages are dropped afterwards.
        unsafe { self.debug.destroy_debug_utils_messenger(self.messenger, None) }
    }
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

thread_local! {
    /// Given back when the thread ends: a test has one of its own.
    static TURN: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Waits until no other test is under the layers. Those of Debian 12 (1.3.239) look their data up without a lock, and
/// crash where another thread makes or destroys a device meanwhile, although Vulkan allows that.
fn take_turn() {
    let lock = || ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    TURN.with(|turn| {
        turn.borrow_mut().get_or_insert_with(lock);
    });
}

/// Creates an instance under the layers, where they are installed and there are messages to collect.
pub(crate) fn create_watched(
    entry: &Entry,
    messages: Option<&Messages>,
    faults: &Faults,
) -> Result<(Instance, Option<Watch>), Error> {
    let plain = vk::InstanceCreateInfo::default();
    let Some(messages) = messages else { return Ok((create(entry, plain, faults)?, None)) };
    // SAFETY: the loader was loaded.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }.unwrap();
    if !layers.iter().any(|l| l.layer_name_as_c_str() == Ok(LAYER)) {
        return Ok((create(entry, plain, faults)?, None));
    }
    take_turn();
    let messages = Arc::new(messages.clone());
    let layers = [LAYER.as_ptr()];
    let mut extensions = vec![ext::debug_utils::NAME.as_ptr()];
    let mut creation = messenger(&messages);
    let enabled = [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];
    let mut features = vk::ValidationFeaturesEXT::default().enabled_validation_features(&enabled);
    let mut info = plain.push_next(&mut creation);
    // SAFETY: as above.
    let found = unsafe { entry.enumerate_instance_extension_properties(Some(LAYER)) }.unwrap();
    if found.iter().any(|e| e.extension_name_as_c_str() == Ok(ext::validation_features::NAME)) {
        extensions.push(ext::validation_features::NAME.as_ptr());
        info = info.push_next(&mut features);
    }
    let instance = create(entry, info.enabled_layer_names(&layers).enabled_extension_names(&extensions), faults)?;
    let debug = ext::debug_utils::Instance::new(entry, &instance);
    // SAFETY: the structures and the messages live longer; the messenger is destroyed before them.
    let made = unsafe { debug.create_debug_utils_messenger(&messenger(&messages), None) };
    let messenger = made.map_err(|result| CallError { call: "vkCreateDebugUtilsMessengerEXT", result })?;
    Ok((instance, Some(Watch { debug, messenger, _messages: messages })))
}

fn messenger(messages: &Arc<Messages>) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(Severity::WARNING | Severity::ERROR)
        .message_type(Type::VALIDATION | Type::PERFORMANCE)
        .pfn_user_callback(Some(on_message))
        .user_data(Arc::as_ptr(messages).cast_mut().cast())
}

/// Takes a message of the layers.
///
/// # Safety
/// As Vulkan calls it: `data` is valid, and `messages` what [`messenger`] has set, which outlives the messenger.
unsafe extern "system" fn on_message(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    messages: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: by the contract of this function, both point to what they should; strings of Vulkan end with a zero.
    let (data, messages) = unsafe { (&*data, &*messages.cast_const().cast::<Messages>()) };
    // SAFETY: as above.
    let text = unsafe { data.message_as_c_str() };
    messages.push(text.unwrap_or(c"a message without text").to_string_lossy().into_owned());
    vk::FALSE
}
