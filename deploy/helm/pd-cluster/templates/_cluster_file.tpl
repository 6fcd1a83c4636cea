{{/* The cluster file that every pod reads: values by the names of the cluster file's keys. */}}

{{/* (root, section, its keys): what `extraConfig` says comes on top; a key without a value is left out. */}}
{{- define "pd.section" -}}
{{- $keys := mergeOverwrite (index . 2) (deepCopy (dig (index . 1) dict (index . 0).Values.extraConfig)) }}

[{{ index . 1 }}]
{{- range $key, $value := $keys }}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "string" $value) (eq $value ""))) }}
{{ $key }} = {{ toJson $value }} {{- /* JSON's scalars and lists of them are TOML's */}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pd.engineKeys" -}}
{{- $v := index . 1 -}}
{{- with $v.engine -}}
{{- $keys := dict "tensor_parallel" .tensorParallel "data_parallel" .dataParallel "max_num_seqs" .maxNumSeqs -}}
{{- $_ := set $keys "max_num_batched_tokens" .maxNumBatchedTokens -}}
{{- $_ := set $keys "ttft_target_s" (float64 .ttftTargetSeconds) -}}
{{- $_ := set $keys "dispatcher" .dispatcher -}}
{{- $_ := set $keys "dispatch_dtype" .dispatchDtype -}}
{{- $_ := set $keys "micro_batches" .microBatches -}}
{{- $_ := set $keys "redundant_experts" .redundantExperts -}}
{{- $_ := set $keys "expert_slots_per_rank" .expertSlotsPerRank -}}
{{- $_ := set $keys "replica_choice" .replicaChoice -}}
{{- $_ := set $keys "rebalance" .rebalance -}}
{{- $_ := set $keys "block_size" .blockSize -}}
{{- $_ := set $keys "num_blocks" .numBlocks -}}
{{- $_ := set $keys "threads" .threads -}}
{{- $_ := set $keys "cpus" .cpus -}}
{{- /* a pod that was given GPUs must compute on them, or say why it cannot */}}
{{- if and $v.gpus.count (ne (index $ 0).Values.mode "rayservice") }}{{ $_ := set $keys "device" "cuda" }}{{ end -}}
{{- if eq (index $ 0).Values.mode "rayservice" }}{{ $_ := set $keys "instances" $v.replicas }}{{ end -}}
{{- toJson $keys -}}
{{- end -}}
{{- end -}}

{{- define "pd.clusterFile" -}}
{{- $m := .Values.model -}}
{{- $kv := .Values.kv -}}
{{- $r := .Values.router -}}
{{- $s := .Values.security -}}
{{- $model := dict "path" $m.source "served_model_name" $m.servedName "dtype" $m.dtype "max_model_len" $m.maxModelLen -}}
{{- $cache := dict "block_size" $kv.blockSize "num_blocks" $kv.numBlocks "max_bytes" $kv.maxBytes -}}
{{- if $kv.memoryFraction }}{{ $_ := set $cache "memory_fraction" (float64 $kv.memoryFraction) }}{{ end -}}
{{- $_ := set $cache "prefix_cache" $kv.prefixCache -}}
{{- $_ := set $cache "verify" $kv.verify -}}
{{- $_ := set $cache "lease_s" $kv.leaseSeconds -}}
{{- $_ := set $cache "transfer_deadline_s" $kv.transferDeadlineSeconds -}}
{{- $router := dict "http_port" $r.httpPort "grpc" $r.grpc.enabled "grpc_port" $r.grpc.port "max_queue" $r.maxQueue -}}
{{- $_ := set $router "request_timeout_s" $r.requestTimeoutSeconds -}}
{{- $_ := set $router "max_retries" $r.maxRetries -}}
{{- if $r.apiKey.existingSecret }}{{ $_ := set $router "api_key_file" "/etc/pd-cluster-keys/api-key" }}{{ end -}}
{{- if $r.adminKey.existingSecret }}{{ $_ := set $router "admin_key_file" "/etc/pd-cluster-keys/admin-key" }}{{ end -}}
{{- $security := dict "allow_insecure" (eq (include "pd.insecure" .) "true") -}}
{{- if $s.tls.existingSecret -}}
{{- $_ := set $security "certificate" "/etc/pd-cluster-tls/tls.crt" -}}
{{- $_ := set $security "private_key" "/etc/pd-cluster-tls/tls.key" -}}
{{- if $s.tls.mutual }}{{ $_ := set $security "root_certificates" "/etc/pd-cluster-tls/ca.crt" }}{{ end -}}
{{- $_ := set $security "server_name" $s.tls.serverName -}}
{{- end -}}
{{- if $s.token.existingSecret }}{{ $_ := set $security "token_file" "/etc/pd-cluster-token/token" }}{{ end -}}
colocated = {{ not .Values.prefill.enabled }}
{{- include "pd.section" (list . "model" $model) }}
{{- include "pd.section" (list . "kv" $cache) }}
{{- include "pd.section" (list . "prefill" (include "pd.engineKeys" (list . .Values.prefill) | fromJson)) }}
{{- include "pd.section" (list . "decode" (include "pd.engineKeys" (list . .Values.decode) | fromJson)) }}
{{- include "pd.section" (list . "router" $router) }}
{{- if $r.grpc.tls.existingSecret }}
{{- $files := dict "certificate" "/etc/pd-cluster-grpc-tls/tls.crt" "private_key" "/etc/pd-cluster-grpc-tls/tls.key" }}
{{- include "pd.section" (list . "router.grpc_tls" $files) }}
{{- end }}
{{- include "pd.section" (list . "security" $security) }}
{{- $launch := dict }}
{{- if eq .Values.mode "rayservice" }}{{ $launch = dict "launcher" "ray" "ray_address" "auto" }}{{ end }}
{{- include "pd.section" (list . "launch" $launch) }}
{{- range $section := keys .Values.extraConfig | sortAlpha }}
{{- if not (has $section (list "model" "kv" "prefill" "decode" "router" "security" "launch")) }}
{{- include "pd.section" (list $ $section dict) }}
{{- end }}
{{- end }}
{{- end -}}
