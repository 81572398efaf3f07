//! The `tandem` program.

#![warn(unreachable_pub)]

mod memory;

fn main() -> std::process::ExitCode {
    tandem_cli::main()
}
