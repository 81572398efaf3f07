//! AMX's tile registers on CPUs that lack them, for tests.
//!
//! The CPU refuses an instruction that it does not have, and Linux sends the thread `SIGILL`. [`install`]
//! handles the signal: it decodes the instruction, does its work on registers of its own, and goes on behind
//! it. So the very code that runs on AMX is tested, a thousand times as slowly.
//!
//! Known are the instructions for bf16: `ldtilecfg`, `tilerelease`, `tilezero`, `tileloadd`, `tileloaddt1`,
//! `tilestored` and `tdpbf16ps`, by Intel's manual ("Instruction Set Extensions Programming Reference").
//! Any other ends the process as if there were no handler.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod decode;
mod tiles;

use std::cell::RefCell;
use std::sync::Once;

use decode::{Instruction, Registers};
use tiles::Tiles;

thread_local! {
    // Without a destructor and made at compile time: the handler must not allocate.
    static TILES: RefCell<Tiles> = const { RefCell::new(Tiles::NONE) };
}

/// Emulates AMX in this process from here on. Later calls do nothing.
///
/// # Panics
/// The CPU lacks FMA, which the emulation uses, or the handler cannot be installed.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "a CPU with FMA");
        // SAFETY: zeroes are a valid `sigaction`; the handler does nothing that a signal forbids.
        let error = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut())
        };
        assert_eq!(error, 0, "a handler of SIGILL");
    });
}

/// Does the work of the instruction that the thread stopped at, and of those of AMX that follow it: a signal
/// takes longer than ten of them.
extern "C" fn handle(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: Linux passes a `ucontext_t`, which it restores the thread from.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let mut registers = Registers::of(context);
    let start = registers.next;
    TILES.with_borrow_mut(|tiles| {
        // SAFETY: the thread would run what is there next: decoding reads no further than the instruction goes.
        while let Some((instruction, length)) = unsafe { decode::decode(&registers) } {
            // SAFETY: the program promises of its addresses what the instruction asks.
            unsafe { run(instruction, tiles) };
            registers.next = registers.next.wrapping_add(length);
        }
    });
    if registers.next == start {
        // SAFETY: the same instruction stops the thread again, and now ends the process.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = registers.next as libc::greg_t;
}

/// # Safety
/// The addresses are those of a program for AMX.
unsafe fn run(instruction: Instruction, tiles: &mut Tiles) {
    // SAFETY: the caller's promise; `install` saw FMA.
    unsafe {
        match instruction {
            Instruction::Configure { from } => tiles.configure(from),
            Instruction::Release => *tiles = Tiles::NONE,
            Instruction::Zero { tile } => tiles.zero(tile),
            Instruction::Load { tile, from, stride } => tiles.load(tile, from, stride),
            Instruction::Store { tile, to, stride } => tiles.store(tile, to, stride),
            Instruction::Multiply { sums, first, second } => tiles.multiply(sums, first, second),
        }
    }
}
