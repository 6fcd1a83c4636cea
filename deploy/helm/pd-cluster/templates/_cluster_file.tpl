{{/* The cluster file that every pod reads: values by the names of the cluster file's keys. */}}

{{/* (key, value): a line, unless there is no value. JSON's scalars are TOML's. */}}
{{- define "pd.toml" -}}
{{- $value := index . 1 -}}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "string" $value) (eq $value ""))) }}
{{ index . 0 }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{- define "pd.clusterFile" -}}
{{- $tls := .Values.security.tls }}
{{- include "pd.toml" (list "colocated" (not .Values.prefill.enabled)) }}

[model]
{{- with .Values.model }}
{{- include "pd.toml" (list "path" .source) }}
{{- include "pd.toml" (list "served_model_name" .servedName) }}
{{- include "pd.toml" (list "dtype" .dtype) }}
{{- include "pd.toml" (list "max_model_len" .maxModelLen) }}
{{- end }}

[kv]
{{- with .Values.kv }}
{{- include "pd.toml" (list "block_size" .blockSize) }}
{{- include "pd.toml" (list "num_blocks" .numBlocks) }}
{{- include "pd.toml" (list "memory_fraction" .memoryFraction) }}
{{- include "pd.toml" (list "max_bytes" .maxBytes) }}
{{- include "pd.toml" (list "prefix_cache" .prefixCache) }}
{{- include "pd.toml" (list "verify" .verify) }}
{{- include "pd.toml" (list "lease_s" .leaseSeconds) }}
{{- include "pd.toml" (list "transfer_deadline_s" .transferDeadlineSeconds) }}
{{- end }}
{{- range $role, $v := dict "prefill" .Values.prefill "decode" .Values.decode }}

[{{ $role }}]
{{- if eq $.Values.mode "rayservice" }}
{{- include "pd.toml" (list "instances" $v.replicas) }}
{{- end }}
{{- with $v.engine }}
{{- include "pd.toml" (list "tensor_parallel" .tensorParallel) }}
{{- include "pd.toml" (list "data_parallel" .dataParallel) }}
{{- include "pd.toml" (list "max_num_seqs" .maxNumSeqs) }}
{{- include "pd.toml" (list "max_num_batched_tokens" .maxNumBatchedTokens) }}
{{- include "pd.toml" (list "redundant_experts" .redundantExperts) }}
{{- include "pd.toml" (list "block_size" .blockSize) }}
{{- include "pd.toml" (list "num_blocks" .numBlocks) }}
{{- include "pd.toml" (list "threads" .threads) }}
{{- end }}
{{- end }}

[router]
{{- with .Values.router }}
{{- include "pd.toml" (list "http_port" .httpPort) }}
{{- include "pd.toml" (list "grpc" .grpc.enabled) }}
{{- include "pd.toml" (list "grpc_port" .grpc.port) }}
{{- include "pd.toml" (list "max_queue" .maxQueue) }}
{{- include "pd.toml" (list "request_timeout_s" .requestTimeoutSeconds) }}
{{- include "pd.toml" (list "max_retries" .maxRetries) }}
{{- if .apiKey.existingSecret }}
{{- include "pd.toml" (list "api_key_file" "/etc/pd-cluster-keys/api-key") }}
{{- end }}
{{- if .adminKey.existingSecret }}
{{- include "pd.toml" (list "admin_key_file" "/etc/pd-cluster-keys/admin-key") }}
{{- end }}
{{- if .grpc.tls.existingSecret }}

[router.grpc_tls]
{{- include "pd.toml" (list "certificate" "/etc/pd-cluster-grpc-tls/tls.crt") }}
{{- include "pd.toml" (list "private_key" "/etc/pd-cluster-grpc-tls/tls.key") }}
{{- end }}
{{- end }}

[security]
{{- include "pd.toml" (list "allow_insecure" (eq (include "pd.insecure" .) "true")) }}
{{- if $tls.existingSecret }}
{{- include "pd.toml" (list "certificate" "/etc/pd-cluster-tls/tls.crt") }}
{{- include "pd.toml" (list "private_key" "/etc/pd-cluster-tls/tls.key") }}
{{- if $tls.mutual }}
{{- include "pd.toml" (list "root_certificates" "/etc/pd-cluster-tls/ca.crt") }}
{{- end }}
{{- include "pd.toml" (list "server_name" $tls.serverName) }}
{{- end }}
{{- if .Values.security.token.existingSecret }}
{{- include "pd.toml" (list "token_file" "/etc/pd-cluster-token/token") }}
{{- end }}
{{- if eq .Values.mode "rayservice" }}

[launch]
{{- include "pd.toml" (list "launcher" "ray") }}
{{- include "pd.toml" (list "ray_address" "auto") }}
{{- end }}
{{- end -}}
