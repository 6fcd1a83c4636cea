{{/* Names, labels and what is derived from values; every check that a schema cannot express fails here, by name. */}}

{{- define "pd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "pd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "pd.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pd.selector" -}}
app.kubernetes.io/name: {{ include "pd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pd.labels" -}}
{{ include "pd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pd.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "pd.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pd.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Roles of the pods of a mode: "prefill decode", or "colocated" when decode does both. */}}
{{- define "pd.roles" -}}
{{- if eq .Values.mode "native" -}}
{{- if .Values.prefill.enabled -}}prefill decode{{- else -}}colocated{{- end -}}
{{- end -}}
{{- end -}}

{{/* (root, role) -> the values of a role */}}
{{- define "pd.roleValues" -}}
{{- $root := index . 0 -}}
{{- toYaml (ternary $root.Values.prefill $root.Values.decode (eq (index . 1) "prefill")) -}}
{{- end -}}

{{/* (role values, role) -> ranks of each pod */}}
{{- define "pd.ranksPerPod" -}}
{{- $v := index . 0 -}}
{{- $ranks := mul $v.engine.tensorParallel $v.engine.dataParallel -}}
{{- if ne (mod $ranks $v.podsPerEngine) 0 -}}
{{- fail (printf "%s: an engine of %d ranks (dataParallel x tensorParallel) cannot be dealt out evenly over podsPerEngine=%d" (index . 1) $ranks (int $v.podsPerEngine)) -}}
{{- end -}}
{{- $share := div $ranks $v.podsPerEngine -}}
{{- if and (ne (mod $share $v.engine.tensorParallel) 0) (ne (mod $v.engine.tensorParallel $share) 0) -}}
{{- fail (printf "%s: %d ranks of each pod neither hold whole workers of %d ranks nor divide one" (index . 1) $share (int $v.engine.tensorParallel)) -}}
{{- end -}}
{{- if and (gt (int $v.gpus.count) 0) (lt (int $v.gpus.count) (int $share)) -}}
{{- fail (printf "%s.gpus.count=%d: each of the %d ranks of a pod needs a GPU of its own" (index . 1) (int $v.gpus.count) (int $share)) -}}
{{- end -}}
{{- $share -}}
{{- end -}}

{{/* (role values, role) -> workers whose lead runs in a pod, at least 1: as many control ports are open */}}
{{- define "pd.leadsPerPod" -}}
{{- max 1 (div (include "pd.ranksPerPod" . | int) (index . 0).engine.tensorParallel) -}}
{{- end -}}

{{/* (drain, terminationGracePeriodSeconds, role) */}}
{{- define "pd.gracePeriod" -}}
{{- $least := add (index . 0).delaySeconds (index . 0).timeoutSeconds -}}
{{- $given := index . 1 -}}
{{- if kindIs "invalid" $given -}}
{{- add $least 30 -}}
{{- else if le (int $given) (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds=%d must be larger than drain.delaySeconds + drain.timeoutSeconds = %d: pods would be killed while requests still finish" (index . 2) (int $given) $least) -}}
{{- else -}}
{{- int $given -}}
{{- end -}}
{{- end -}}

{{/* What the cluster file says of security.allow_insecure: control streams go without TLS, or pods of an engine meet, which
     they always do in the clear. Fails when nothing closes the network. */}}
{{- define "pd.insecure" -}}
{{- $s := .Values.security -}}
{{- $tls := and $s.tls.existingSecret (or $s.token.existingSecret $s.tls.mutual) -}}
{{- if and $s.tls.existingSecret (not $s.token.existingSecret) (not $s.tls.mutual) -}}
{{- fail "security.tls needs security.token.existingSecret or security.tls.mutual: without either, anybody may open a control stream" -}}
{{- end -}}
{{- if and $s.token.existingSecret (not $s.tls.existingSecret) (not $s.allowInsecure) -}}
{{- fail "security.token without security.tls would cross the network in the clear: set security.tls.existingSecret, or security.allowInsecure when a mesh encrypts" -}}
{{- end -}}
{{- $many := false -}}
{{- $hostNetwork := false -}}
{{- range $role := splitList " " (include "pd.roles" .) -}}
{{- if $role -}}
{{- $v := include "pd.roleValues" (list $ $role) | fromYaml -}}
{{- if gt (int $v.podsPerEngine) 1 }}{{ $many = true }}{{ end -}}
{{- if $v.hostNetwork }}{{ $hostNetwork = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $what := ternary "control ports are" "the ports by which pods of an engine meet are" (not $many) -}}
{{- $tell := ternary "set security.tls.existingSecret, or security.allowInsecure" "set security.allowInsecure" (not $many) -}}
{{- if and (or $many (not $tls)) (not $s.allowInsecure) -}}
{{- if not .Values.networkPolicy.enabled -}}
{{- fail (printf "with networkPolicy.enabled=false %s open to the cluster: %s when the network is closed by other means" $what $tell) -}}
{{- end -}}
{{- if $hostNetwork -}}
{{- fail (printf "hostNetwork pods are outside every NetworkPolicy, and %s open: %s when the network is closed by other means" $what $tell) -}}
{{- end -}}
{{- end -}}
{{- or $many (not $tls) -}}
{{- end -}}

{{/* Checks across roles, and of the model cache. */}}
{{- define "pd.check" -}}
{{- $c := .Values.model.cache -}}
{{- if eq .Values.mode "native" -}}
{{- range $role := splitList " " (include "pd.roles" .) -}}
{{- $v := include "pd.roleValues" (list $ $role) | fromYaml -}}
{{- $_ := include "pd.ranksPerPod" (list $v $role) -}}
{{- if and $v.autoscaling.enabled (gt (int $v.podsPerEngine) 1) -}}
{{- fail (printf "%s.autoscaling scales pods one by one, so it needs podsPerEngine=1" $role) -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (ne $v.workload "StatefulSet") -}}
{{- fail (printf "%s.autoscaling needs workload=StatefulSet" $role) -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas is larger than maxReplicas" $role) -}}
{{- end -}}
{{- end -}}
{{- if gt (int .Values.router.autoscaling.minReplicas) (int .Values.router.autoscaling.maxReplicas) -}}
{{- fail "router.autoscaling: minReplicas is larger than maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if and $c.enabled (not $c.existingClaim) (not (or (has "ReadWriteMany" $c.accessModes) (has "ReadOnlyMany" $c.accessModes))) -}}
{{- fail "model.cache is mounted by every pod, so its accessModes need ReadWriteMany or ReadOnlyMany (ReadWriteOnce binds a volume to one node)" -}}
{{- end -}}
{{- range $route := list "httpRoute" "grpcRoute" -}}
{{- $r := index $.Values.router $route -}}
{{- if and $r.enabled (not $r.gateway) -}}
{{- fail (printf "router.%s.enabled needs router.%s.gateway" $route $route) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pd.cacheClaim" -}}
{{- default (printf "%s-models" (include "pd.fullname" .)) .Values.model.cache.existingClaim -}}
{{- end -}}

{{- define "pd.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* list of added capabilities */}}
{{- define "pd.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* Every container keeps what it writes under /tmp. */}}
{{- define "pd.env" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /tmp/cache
{{- if .Values.model.cache.enabled }}
- name: HF_HOME
  value: {{ printf "%s/huggingface" .Values.model.cache.mountPath | quote }}
{{- end }}
{{- if .Values.model.huggingFace.existingSecret }}
- name: HF_TOKEN_PATH
  value: /etc/hugging-face/token
{{- end }}
{{- end -}}

{{/* Secrets that both ends of a control stream read, from where the cluster file says. */}}
{{- define "pd.volumeMounts" -}}
- name: config
  mountPath: /etc/pd-cluster
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .Values.model.cache.enabled }}
- name: models
  mountPath: {{ .Values.model.cache.mountPath }}
  readOnly: {{ .Values.model.cache.readOnly }}
{{- end }}
{{- if .Values.model.huggingFace.existingSecret }}
- name: hugging-face
  mountPath: /etc/hugging-face
  readOnly: true
{{- end }}
{{- if .Values.security.tls.existingSecret }}
- name: control-tls
  mountPath: /etc/pd-cluster-tls
  readOnly: true
{{- end }}
{{- if .Values.security.token.existingSecret }}
- name: control-token
  mountPath: /etc/pd-cluster-token
  readOnly: true
{{- end }}
{{- end -}}

{{/* (root, size limit of /tmp) */}}
{{- define "pd.volumes" -}}
{{- $root := index . 0 -}}
- name: config
  configMap:
    name: {{ include "pd.fullname" $root }}
- name: tmp
  emptyDir:
    sizeLimit: {{ index . 1 }}
{{- if $root.Values.model.cache.enabled }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "pd.cacheClaim" $root }}
    readOnly: {{ $root.Values.model.cache.readOnly }}
{{- end }}
{{- with $root.Values.model.huggingFace }}
{{- if .existingSecret }}
- name: hugging-face
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .key }}
        path: token
{{- end }}
{{- end }}
{{- with $root.Values.security.tls.existingSecret }}
- name: control-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with $root.Values.security.token }}
{{- if .existingSecret }}
- name: control-token
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .key }}
        path: token
{{- end }}
{{- end }}
{{- end -}}

{{/* (root, values of a role, component): where its pods may run */}}
{{- define "pd.scheduling" -}}
{{- $root := index . 0 -}}
{{- $v := index . 1 -}}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $v.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $v.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ $v.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "pd.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ index . 2 }}
{{- end }}
{{- end -}}
