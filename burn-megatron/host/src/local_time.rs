//! The time of the machine's time zone, as text.

use std::ffi::CStr;

/// The time in the format of C's `strftime`; empty if it is longer than 511 bytes.
pub fn local_time(format: &CStr) -> String {
    let mut buffer = [0u8; 512];
    // SAFETY: `localtime_r` fills `now`; `strftime` writes at most the length of the buffer and returns what it wrote.
    let length = unsafe {
        let (time, mut now) = (libc::time(std::ptr::null_mut()), std::mem::zeroed::<libc::tm>());
        libc::localtime_r(&time, &mut now);
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &now)
    };
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}
