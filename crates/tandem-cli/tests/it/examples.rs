//! The files of `examples/launch` start what they say, as far as that can be seen without a cluster.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::workshop::{Workshop, free_port, python_with_torchrun};
use tandem_comm::{Environment, Launch, Launcher, RendezvousEndpoint};
use yaml_rust2::{Yaml, YamlLoader};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/launch").join(name)
}

fn text(name: &str) -> String {
    fs::read_to_string(example(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn documents(name: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&text(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn manifest(name: &str) -> Yaml {
    let mut documents = documents(name);
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

/// The value at a path of keys and, as numbers, places in lists.
fn at<'a>(yaml: &'a Yaml, path: &str) -> &'a Yaml {
    path.split('.').fold(yaml, |yaml, key| {
        let found = key.parse::<usize>().map_or_else(|_| &yaml[key], |place| &yaml[place]);
        assert!(!found.is_badvalue(), "no {key} of {path} in {yaml:?}");
        found
    })
}

fn string<'a>(yaml: &'a Yaml, path: &str) -> &'a str {
    at(yaml, path).as_str().unwrap_or_else(|| panic!("{path} is no string"))
}

fn number(yaml: &Yaml, path: &str) -> i64 {
    at(yaml, path).as_i64().unwrap_or_else(|| panic!("{path} is no number"))
}

fn list<'a>(yaml: &'a Yaml, path: &str) -> &'a [Yaml] {
    at(yaml, path).as_vec().unwrap_or_else(|| panic!("{path} is no list"))
}

/// A run that is whole, for comparison, and one of the same settings at `data/run.toml`, as on the manifests' volume.
fn shop() -> Workshop {
    let shop = Workshop::new();
    let toml = |output: &str| shop.dpo_toml(output).replace("steps = 6", "steps = 6\nmicro_batch_size = 1");
    shop.write("whole.toml", &toml("whole"));
    shop.run(&["train", "whole.toml"]).expect(0);
    fs::create_dir(shop.path("data")).unwrap();
    let inside = toml("run")
        .replace("\"model\"", "\"../model\"")
        .replace("\"preferences.jsonl\"", "\"../preferences.jsonl\"")
        .replace("\"cache\"", "\"../cache\"")
        .replace("\"run\"", "\"../run\"");
    shop.write("data/run.toml", &inside);
    shop
}

fn same_as_whole(shop: &Workshop) {
    assert_eq!(shop.metrics("run"), shop.metrics("whole"));
    assert!(shop.bytes("run/final/model.safetensors") == shop.bytes("whole/final/model.safetensors"));
}

/// Properties of each pod of a manifest: one container, a shared volume, time to save.
fn check_pod(spec: &Yaml) {
    let containers = list(spec, "containers");
    assert_eq!(containers.len(), 1);
    let mounts = list(&containers[0], "volumeMounts");
    assert_eq!(string(&mounts[0], "mountPath"), "/data");
    let volume = &list(spec, "volumes")[0];
    assert_eq!(string(&mounts[0], "name"), string(volume, "name"));
    // All pods of a job mount the same claim.
    assert!(!string(volume, "persistentVolumeClaim.claimName").is_empty());
    assert!(number(spec, "terminationGracePeriodSeconds") >= 60);
}

/// The variables that a pod's manifest sets.
fn variables(container: &Yaml) -> Environment {
    let set = container["env"].as_vec().into_iter().flatten();
    // A number without quotes is no valid value of a variable.
    set.map(|pair| (string(pair, "name").to_owned(), string(pair, "value").to_owned())).collect()
}

/// Starts a pod's command with its variables, the volume and the first pod's address replaced by what is here.
fn pod(shop: &Workshop, container: &Yaml, environment: &Environment, port: u16) -> Child {
    let command: Vec<_> = list(container, "command").iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(command[0], "tandem");
    let data = shop.path("data");
    let words: Vec<_> =
        command[1..].iter().map(|word| word.replace("/data", &data.to_string_lossy())).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let mut child = shop.command(&words);
    child.envs(environment).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Runs all pods at once on this machine.
fn run_pods(container: &Yaml, environments: &[Environment]) {
    let (shop, port) = (shop(), free_port());
    let mut pods: Vec<_> =
        environments.iter().map(|environment| pod(&shop, container, environment, port)).collect();
    for pod in &mut pods {
        assert_eq!(pod.wait().unwrap().code(), Some(0));
    }
    same_as_whole(&shop);
}

/// Variables of each pod of an indexed Job, which all meet at the first, `host`.
fn indexed_environments(container: &Yaml, pods: i64, host: &str) -> Vec<Environment> {
    let port = number(container, "ports.0.containerPort") as u16;
    (0..pods)
        .map(|index| {
            let mut environment = variables(container);
            environment.insert("JOB_COMPLETION_INDEX".into(), index.to_string());
            let launch = Launch::from_environment(&environment).unwrap();
            assert_eq!(launch.launcher, Launcher::IndexedJob);
            assert_eq!((launch.process as i64, launch.num_processes as i64), (index, pods));
            let meeting_point = RendezvousEndpoint { host: host.to_owned(), port, served: false };
            assert_eq!(launch.meeting_point, Some(meeting_point));
            environment
        })
        .collect()
}

#[test]
fn the_indexed_job_starts_all_its_pods_and_ends_at_a_mistake() {
    let [service, job] = &documents("job.yaml")[..] else { panic!("a Service and a Job") };
    assert_eq!((string(service, "kind"), string(job, "kind")), ("Service", "Job"));
    let name = string(job, "metadata.name");
    // A headless service of all pods of the job, whose subdomain it is.
    assert_eq!(string(service, "spec.clusterIP"), "None");
    let selector = &service["spec"]["selector"]["batch.kubernetes.io/job-name"];
    assert_eq!(selector.as_str(), Some(name));
    let spec = at(job, "spec");
    let pods = number(spec, "completions");
    assert_eq!((string(spec, "completionMode"), number(spec, "parallelism")), ("Indexed", pods));
    assert!(number(spec, "backoffLimit") >= pods, "each pod that is replaced counts");
    let rule = at(spec, "podFailurePolicy.rules.0");
    assert_eq!(string(rule, "action"), "FailJob");
    assert_eq!(list(rule, "onExitCodes.values"), [Yaml::Integer(2)]);
    let pod = at(spec, "template.spec");
    check_pod(pod);
    assert_eq!(string(pod, "restartPolicy"), "Never");
    assert_eq!(string(pod, "subdomain"), string(service, "metadata.name"));
    let container = &list(pod, "containers")[0];
    assert_eq!(string(rule, "onExitCodes.containerName"), string(container, "name"));
    let host = format!("{name}-0.{}", string(pod, "subdomain"));
    run_pods(container, &indexed_environments(container, pods, &host));
}

#[test]
fn the_jobset_starts_one_job_of_all_its_pods() {
    let yaml = manifest("jobset.yaml");
    assert_eq!(string(&yaml, "apiVersion"), "jobset.x-k8s.io/v1alpha2");
    assert_eq!(string(&yaml, "kind"), "JobSet");
    assert!(number(&yaml, "spec.failurePolicy.maxRestarts") > 0);
    assert_eq!(at(&yaml, "spec.network.enableDNSHostnames").as_bool(), Some(true));
    let jobs = list(&yaml, "spec.replicatedJobs");
    assert_eq!((jobs.len(), number(&jobs[0], "replicas")), (1, 1));
    let job = at(&jobs[0], "template.spec");
    let pods = number(job, "completions");
    assert_eq!((string(job, "completionMode"), number(job, "parallelism")), ("Indexed", pods));
    assert_eq!(
        number(job, "backoffLimit"),
        0,
        "a pod that is replaced alone would wait for ranks that are gone"
    );
    let spec = at(job, "template.spec");
    check_pod(spec);
    assert_eq!(string(spec, "restartPolicy"), "Never");
    let container = &list(spec, "containers")[0];
    // What the JobSet controller names the first pod.
    let (set, replicated) = (string(&yaml, "metadata.name"), string(&jobs[0], "name"));
    let host = format!("{set}-{replicated}-0-0.{set}");
    run_pods(container, &indexed_environments(container, pods, &host));
}

#[test]
fn the_pytorchjob_starts_one_job_of_all_its_pods() {
    let yaml = manifest("pytorchjob.yaml");
    assert_eq!((string(&yaml, "apiVersion"), string(&yaml, "kind")), ("kubeflow.org/v1", "PyTorchJob"));
    assert!(number(&yaml, "spec.runPolicy.backoffLimit") > 0);
    let [master, worker] =
        ["Master", "Worker"].map(|kind| at(&yaml, &format!("spec.pytorchReplicaSpecs.{kind}")));
    for replica in [master, worker] {
        // "ExitCode" takes 75 for final.
        assert_eq!(string(replica, "restartPolicy"), "OnFailure");
        check_pod(at(replica, "template.spec"));
    }
    assert_eq!(at(master, "template"), at(worker, "template"));
    assert_eq!(number(master, "replicas"), 1);
    let size = 1 + number(worker, "replicas");
    let container = &list(master, "template.spec.containers")[0];
    // The operator looks for both names.
    assert_eq!(string(container, "name"), "pytorch");
    assert_eq!(string(container, "ports.0.name"), "pytorchjob-port");
    let port = number(container, "ports.0.containerPort") as u16;
    let environments: Vec<Environment> = (0..size)
        .map(|rank| {
            let mut environment = variables(container);
            // What the operator adds.
            let host = format!("{}-master-0", string(&yaml, "metadata.name"));
            for (name, value) in [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", size.to_string()),
                ("MASTER_ADDR", host.clone()),
                ("MASTER_PORT", port.to_string()),
            ] {
                assert!(environment.insert(name.into(), value).is_none(), "{name} is the operator's to set");
            }
            let launch = Launch::from_environment(&environment).unwrap();
            assert_eq!((launch.process as i64, launch.num_processes as i64), (rank, size));
            assert_eq!(launch.meeting_point, Some(RendezvousEndpoint { host, port, served: false }));
            environment
        })
        .collect();
    run_pods(container, &environments);
}

/// Stands in for `srun`: so many tasks, with the variables that Slurm sets.
const SRUN: &str = r#"#!/usr/bin/env bash
set -u
while [ "$1" != tandem ]; do echo "$1" >>srun-options; shift; done
for rank in 0 1 2; do
    SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS=3 SLURM_LOCALID=$rank \
        SLURM_STEP_NODELIST=localhost "$@" &
done
highest=0
for task in $(jobs -p); do
    wait "$task"; code=$?
    [ $code -gt $highest ] && highest=$code
done
exit $highest
"#;

/// Puts a program into the shop's folder `bin`.
fn install(shop: &Workshop, name: &str, script: &str) {
    fs::create_dir_all(shop.path("bin")).unwrap();
    let name = format!("bin/{name}");
    shop.write(&name, script);
    fs::set_permissions(shop.path(&name), fs::Permissions::from_mode(0o755)).unwrap();
}

/// A script of the examples, run by bash in the shop with the shop's programs before all others.
fn script(shop: &Workshop, name: &str) -> Command {
    let checked = Command::new("bash").arg("-n").arg(example(name)).status().unwrap();
    assert!(checked.success(), "{name} is no valid script");
    let tandem = shop.command(&[]).get_program().to_string_lossy().into_owned();
    install(shop, "tandem", &format!("#!/bin/sh\nexec '{tandem}' \"$@\"\n"));
    let path = format!("{}:{}", shop.path("bin").display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.arg(example(name)).arg(shop.path("data/run.toml")).env("PATH", path).current_dir(shop.path(""));
    command
}

#[test]
fn the_slurm_script_asks_for_one_task_a_rank_and_starts_them() {
    let text = text("slurm.sbatch");
    let options: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("#SBATCH --"))
        .map(|option| option.split_once('=').unwrap_or((option, "")))
        .collect();
    let count = |name: &str| options[name].parse::<u32>().unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(count("nodes") > 0 && count("ntasks-per-node") > 0 && count("cpus-per-task") > 0);
    let (signal, seconds) = options["signal"].split_once('@').unwrap();
    assert!(signal == "TERM" && seconds.parse::<u32>().unwrap() >= 60, "the ranks are told in time to save");
    assert!(options.contains_key("requeue"));
    // Slurm reads its options up to the first command.
    let first_command = text.lines().position(|line| !line.starts_with('#')).unwrap();
    assert!(text.lines().skip(first_command).all(|line| !line.starts_with("#SBATCH")));

    let shop = shop();
    install(&shop, "srun", SRUN);
    install(&shop, "scontrol", "#!/bin/sh\necho \"$@\" >>requeued\n");
    let run = |shop: &Workshop| {
        let mut command = script(shop, "slurm.sbatch");
        // Its port is made of the job's number.
        command.env("SLURM_JOB_ID", "4711").env("SLURM_CPUS_PER_TASK", "1").status().unwrap()
    };
    assert!(run(&shop).success());
    same_as_whole(&shop);
    assert!(shop.read("srun-options").contains("--kill-on-bad-exit=0"));
    assert!(!shop.path("requeued").exists(), "a job that is done is not started again");
}

#[test]
fn the_slurm_script_starts_again_what_a_restart_mends_and_nothing_else() {
    let shop = Workshop::new();
    install(&shop, "scontrol", "#!/bin/sh\necho \"$@\" >>requeued\n");
    for (code, again, restarts) in [
        (75, true, "0"),
        (137, true, "3"),
        (143, true, "0"),
        (1, false, "0"),
        (2, false, "0"),
        (75, false, "20"),
    ] {
        install(&shop, "srun", &format!("#!/bin/sh\nexit {code}\n"));
        let mut command = script(&shop, "slurm.sbatch");
        command
            .env("SLURM_JOB_ID", "4711")
            .env("SLURM_CPUS_PER_TASK", "1")
            .env("SLURM_RESTART_COUNT", restarts);
        assert_eq!(command.status().unwrap().code(), Some(code));
        let requeued = fs::read_to_string(shop.path("requeued")).unwrap_or_default();
        assert_eq!(requeued, if again { "requeue 4711\n" } else { "" }, "{code} after {restarts} restarts");
        let _ = fs::remove_file(shop.path("requeued"));
    }
}

#[test]
fn the_torchrun_script_starts_ranks() {
    let Some(python) = python_with_torchrun() else { return };
    let shop = shop();
    let python = python.to_string_lossy();
    install(&shop, "torchrun", &format!("#!/bin/sh\nexec '{python}' -m torch.distributed.run \"$@\"\n"));
    let status = script(&shop, "torchrun.sh").env("ENDPOINT", format!("localhost:{}", free_port())).status();
    assert!(status.unwrap().success());
    same_as_whole(&shop);
}

#[test]
fn every_example_is_in_the_list_of_them() {
    let list = text("README.md");
    for entry in fs::read_dir(example("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "README.md" || list.contains(&format!("`{name}`")), "{name}");
    }
}
